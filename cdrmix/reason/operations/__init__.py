"""Operations on memories: windows, rollouts and the phases that train them."""
