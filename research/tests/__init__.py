"""Tests of ``research``; they share the fixtures of ``tests``."""
