"""Hand finished runs out to the hospitals that took part: the coordinator's side."""
