//! Shapes, dtypes, tensors and the Backend contract
