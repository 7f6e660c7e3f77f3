"""Operations that programs call, a folder for each."""
