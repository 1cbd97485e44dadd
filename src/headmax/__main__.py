from headmax.cli import main

main()
