"""The SuperLink, the server that hospitals connect to, and the Flower ``Grid`` by which a run uses it.

On the coordinator, only this package uses private parts of Flower (1.39 to 1.42).
"""
