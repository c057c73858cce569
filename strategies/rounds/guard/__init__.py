"""Guard against one site that harms the model: what looks odd, who judges it, and what is kept of it between rounds."""
