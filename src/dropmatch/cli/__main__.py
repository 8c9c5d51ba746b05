from dropmatch.cli import main

main()
