//! How a world of workers is born, addressed, fails and dies
