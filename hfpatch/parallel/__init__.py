"""Rows and heads shared between ranks."""
