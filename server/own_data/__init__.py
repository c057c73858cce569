"""An experiment made from somebody's own table and pictures."""
