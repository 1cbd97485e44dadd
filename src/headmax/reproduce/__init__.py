"""The paper's tables and figures at a scale that fits a GPU for minutes, with the controls it lacks: runs, their records, and the page."""
