"""The paper's tables at a scale that fits a GPU for minutes, with the controls it lacks: runs as data, scores, statistics over seeds."""
