"""Weights that live on servers."""
