"""Steps that go wrong: seen, judged, and answered."""
