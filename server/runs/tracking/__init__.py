"""Copies of a run's figures for TensorBoard, MLflow and the terminal."""
