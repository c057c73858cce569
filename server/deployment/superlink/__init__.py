"""The SuperLink (the server that hospitals connect to), and the Flower ``Grid`` by which a run exchanges messages.

On the coordinator, only this package uses private parts of Flower (1.39 to 1.42).
"""
