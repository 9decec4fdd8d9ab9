"""Load the fixtures of all tests."""

pytest_plugins = ["tests.fixtures"]
