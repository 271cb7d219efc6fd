//! Layers over the Backend contract
