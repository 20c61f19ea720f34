"""Shipped configurations, as package data: ``mm-trainer recipes`` lists them."""
