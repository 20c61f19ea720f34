"""Pipelines that model families reuse: flow matching and its noise schedules."""
