"""The hospital that tests of the check break."""
