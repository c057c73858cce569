"""``flwr-client preview --attack``: the hospital attacks itself, as a coordinator could that sends what it likes."""
