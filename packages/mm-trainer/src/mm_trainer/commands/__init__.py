"""What a user can ask for, one module a command, run on ranks or without."""
