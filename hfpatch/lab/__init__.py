"""Looks at a training step from outside: checks, measurements, and what they need. The core imports
none of it."""
