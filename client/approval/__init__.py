"""Review of a coordinator's plans by people at the hospital: description, approval or denial, and record of runs."""
