"""The paper's proposition and theorems as experiments, and their pictures."""
