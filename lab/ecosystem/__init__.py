"""Other libraries' own tests, run on headmax. They are read from where they are; none of their code is here."""
