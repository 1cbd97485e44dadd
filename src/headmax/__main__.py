from headmax_cli import main

main()
