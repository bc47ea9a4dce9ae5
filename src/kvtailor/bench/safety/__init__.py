"""`kvtailor check --measure`: which plans are safe on a model, measured on it."""
