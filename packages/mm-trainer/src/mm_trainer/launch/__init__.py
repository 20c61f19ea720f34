"""From a command to ranks, and from their failures to one message."""
