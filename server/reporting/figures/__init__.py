"""SVG figures of reports."""
