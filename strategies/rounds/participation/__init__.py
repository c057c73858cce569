"""Who takes part in a run: roll call, label fit, draw of a round's sites."""
