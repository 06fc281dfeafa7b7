"""Errors, files, tables and terminal output that every room uses."""
