"""From a bound configuration to a trained model: build, step, validate, save."""
