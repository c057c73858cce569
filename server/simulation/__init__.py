"""All sites on one machine: inline and on Ray, comparisons, studies, the demo."""
