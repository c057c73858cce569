"""Image sets, their sources, patient-disjoint splits and partitions over sites."""
