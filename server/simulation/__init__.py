"""All sites on one machine: inline and on Ray, grids of runs, the demo."""
