"""Keys, signatures, the audit chain and proof of authorship."""
