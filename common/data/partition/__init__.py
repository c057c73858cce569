"""One data set divided among simulated sites, as the papers do it."""
