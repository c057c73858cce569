"""Secure aggregation: the coordinator learns the sum of the sites' updates and no single update.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, over the complete graph of a round's sites. (Bell et al., CCS 2020, thin
out the graph for thousands of clients; there are fewer hospitals.) Departures:

- Some head rows belong to some sites only. A mask between two sites covers the values that both send: the trunk, and
  the head rows that both own.
- A site has one mask of its own for each *segment*, the head rows with the same owners. So a segment with only one
  remaining site stays masked while the sums of the others are unmasked.
- Sites train first and agree on masks afterwards, because training takes long, and most sites are lost in training.
"""
