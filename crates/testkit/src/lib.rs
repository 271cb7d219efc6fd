//! Conformance suites, scripted workers and fixtures for tests
