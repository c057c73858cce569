"""What a hospital's policy lets happen: checks of each request, limits of cost and time, the audit of what left."""
