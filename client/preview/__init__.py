"""What a hospital can look at before it trains: images as the network sees them, and a dry run."""
