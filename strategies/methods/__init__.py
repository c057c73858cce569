"""The methods: those of the papers, their baselines, and the methods that the papers compare to."""
