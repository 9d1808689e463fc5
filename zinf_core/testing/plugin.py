"""Pytest plugin of the conformance kit; imports nothing but pytest until a test asks for it."""
