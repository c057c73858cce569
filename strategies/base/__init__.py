"""What every method is made of: declaration, state, aggregator, record of a round."""
