from psgc.launch.cli import main

main()
