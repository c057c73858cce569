"""Secure aggregation: the coordinator sees sums of updates and no single one.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, over the complete graph of a round's sites: Bell et al., CCS 2020, thin
the graph for thousands of clients, which hospitals are not. Departures, each because some head rows are made by some
sites only:

- A mask between two sites covers what both send: the trunk, and the head rows that both own.
- A site's own mask is one for each *segment*, the rows of the same owners, so that a segment which only one site is
  left in stays masked while the others' sums are opened.
- Sites train first and agree on masks afterwards: training is what takes long and what sites are lost in.
"""
