"""The HTML report, the model card, and the pages of comparisons and studies."""
