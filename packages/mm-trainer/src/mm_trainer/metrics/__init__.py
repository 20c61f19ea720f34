"""What a run tells of itself: windows of steps, phases, sinks, profiles."""
