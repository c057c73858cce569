"""The coordinator's folder: its authority, admitted sites, connections."""
