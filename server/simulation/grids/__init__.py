"""Many runs, then what they say together: comparisons, studies, the benchmark."""
