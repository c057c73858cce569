"""Shared parts of HTML pages and of tables for people."""
