"""The coordinator's folder: certificate authority, admitted sites and state of connections."""
